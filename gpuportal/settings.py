"""Every setting, from the environment, with a default that works. Read it from top to bottom."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog
from csp.constants import NONE, SELF

from gpuportal import env
from gpuportal.errors import SetupError
from gpuportal.paths import socket_folder

BASE_DIR = Path(__file__).resolve().parent.parent

# -- the data folder: embedded services, generated keys, logs ------------------------------------------------------

GPUPORTAL_DATA = env.folder("GPUPORTAL_DATA", BASE_DIR / "data")
SECRET_KEY = env.kept_secret("SECRET_KEY", GPUPORTAL_DATA / "secret.key", env.random_key)
#: Encrypts the secrets of connected clusters.
FIELD_ENCRYPTION_KEY = env.kept_secret(
    "FIELD_ENCRYPTION_KEY", GPUPORTAL_DATA / "field.key", env.fernet_key, env.is_fernet_key
)

DEBUG = env.boolean("DEBUG")
ALLOWED_HOSTS = env.names("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = env.names("CSRF_TRUSTED_ORIGINS")
#: Where people and running jobs reach the portal.
GPUPORTAL_PUBLIC_URL = env.text("GPUPORTAL_PUBLIC_URL", "http://127.0.0.1:8000").rstrip("/")
#: Folder on the clusters under which jobs find their checkpoints.
GPUPORTAL_CHECKPOINT_ROOT = env.text("GPUPORTAL_CHECKPOINT_ROOT", "/checkpoints").rstrip("/")
#: "open": everybody sees who waits for what; "private": only the own teams' jobs.
GPUPORTAL_QUEUE = env.choice("GPUPORTAL_QUEUE", "open", ("open", "private"))
#: Offer the demonstration on an empty database: yes, no, or ask at a terminal.
GPUPORTAL_DEMO = env.choice("GPUPORTAL_DEMO", "yes", ("yes", "no", "ask"))
GPUPORTAL_LOG_FORMAT = env.choice("GPUPORTAL_LOG_FORMAT", "text", ("text", "json"))
GPUPORTAL_CURRENCY = env.text("GPUPORTAL_CURRENCY", "EUR")
#: A node or cluster whose state was seen longer ago than this (seconds) counts as unknown.
GPUPORTAL_STALE_AFTER = env.integer("GPUPORTAL_STALE_AFTER", 300, 10, 86_400)
#: Groups of the identity provider -> "team:role" or "staff:manager", as JSON.
GPUPORTAL_OIDC_GROUPS = env.groups("GPUPORTAL_OIDC_GROUPS")
GPUPORTAL_OIDC_GROUPS_CLAIM = env.text("GPUPORTAL_OIDC_GROUPS_CLAIM", "groups")
#: Seconds after which a job that could start, and does not, has waited for long.
GPUPORTAL_LONG_WAIT = env.integer("GPUPORTAL_LONG_WAIT", 4 * 3600, 60, 30 * 86_400)
#: Webhooks may go to private addresses, and by http.
GPUPORTAL_WEBHOOK_PRIVATE = env.boolean("GPUPORTAL_WEBHOOK_PRIVATE")
GPUPORTAL_PROMETHEUS_URL = env.url("GPUPORTAL_PROMETHEUS_URL", ("http", "https"))
# Labels of the DCGM exporter that name the node and the device.
GPUPORTAL_PROMETHEUS_NODE_LABEL = env.text("GPUPORTAL_PROMETHEUS_NODE_LABEL", "Hostname")
GPUPORTAL_PROMETHEUS_DEVICE_LABEL = env.text("GPUPORTAL_PROMETHEUS_DEVICE_LABEL", "gpu")
BEHIND_TLS = env.boolean("GPUPORTAL_BEHIND_TLS")

# -- database and broker: embedded in the data folder unless given -------------------------------------------------

DATABASE_URL = env.url("DATABASE_URL", ("postgresql", "postgres"))
REDIS_URL = env.url("REDIS_URL", ("redis", "rediss", "unix", "redis+socket"))
EMBEDDED_DATABASE, EMBEDDED_REDIS = not DATABASE_URL, not REDIS_URL


def _database() -> dict[str, object]:
    common = {
        "ENGINE": "django.db.backends.postgresql",
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {"connect_timeout": 5},
    }
    if not DATABASE_URL:
        return {**common, "NAME": "gpuportal", "USER": "postgres", "HOST": str(socket_folder(GPUPORTAL_DATA))}
    parts = urlsplit(DATABASE_URL)
    try:
        port = parts.port or ""
    except ValueError:
        raise SetupError(f"DATABASE_URL: the port in {parts.netloc!r} is not a number") from None
    query = dict(pair.split("=", 1) for pair in parts.query.split("&") if "=" in pair)
    return {
        **common,
        "NAME": unquote(parts.path.lstrip("/")) or "gpuportal",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(query.pop("host", "") or parts.hostname or ""),
        "PORT": port,
        "OPTIONS": {"connect_timeout": 5, **query},
    }


DATABASES = {"default": _database()}
REDIS_SOCKET = socket_folder(GPUPORTAL_DATA) / "redis.sock"
#: A socket is unix:// for the Redis client and redis+socket:// for Celery.
REDIS_URL = f"unix://{REDIS_SOCKET}" if EMBEDDED_REDIS else REDIS_URL.replace("redis+socket://", "unix://", 1)

# -- applications --------------------------------------------------------------------------------------------------

AUTH_USER_MODEL = "teams.User"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django.contrib.postgres",
    "django_htmx",
    "django_prometheus",
    "rest_framework",
    "django_filters",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "csp",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "axes",
    "gpuportal",
    "teams",
    "scheduling",
]

MIDDLEWARE = [
    "gpuportal.middleware.request_id",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "gpuportal.middleware.own_time_zone",
    "gpuportal.middleware.own_password_first",
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "gpuportal.urls"
WSGI_APPLICATION = "gpuportal.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "scheduling.context.portal",
            ],
        },
    }
]

# -- signing in ----------------------------------------------------------------------------------------------------

AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
ACCOUNT_LOGOUT_REDIRECT_URL = "/accounts/login/"
ACCOUNT_LOGIN_METHODS = {"username", "email"}
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_ADAPTER = "teams.adapters.AccountAdapter"
SOCIALACCOUNT_ADAPTER = "teams.adapters.SocialAccountAdapter"
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*", "password2*"]
ACCOUNT_RATE_LIMITS = {"login": "60/m/ip", "login_failed": False}
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
# Off: it writes a row in every request, polls included; sign-ins are listed all the same.
USERSESSIONS_TRACK_ACTIVITY = False
SOCIALACCOUNT_AUTO_SIGNUP = True
SOCIALACCOUNT_LOGIN_ON_GET = False
OIDC_SERVER_URL = env.url("OIDC_SERVER_URL", ("http", "https"))
SOCIALACCOUNT_PROVIDERS = {}
if OIDC_SERVER_URL:
    SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {
            "OAUTH_PKCE_ENABLED": True,
            "APPS": [
                {
                    "provider_id": "sso",
                    "name": env.text("OIDC_NAME", "Single sign-on"),
                    "client_id": env.text("OIDC_CLIENT_ID"),
                    "secret": env.text("OIDC_CLIENT_SECRET"),
                    "settings": {"server_url": OIDC_SERVER_URL},
                }
            ],
        }
    }
AXES_FAILURE_LIMIT = env.integer("GPUPORTAL_LOGIN_FAILURES", 8, 3, 100)
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_VERBOSE = False

# -- security headers ----------------------------------------------------------------------------------------------

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        # Plotly sets inline styles on what it draws; scripts stay strict.
        "style-src": [SELF, "'unsafe-inline'"],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [SELF],
        "form-action": [SELF] if not OIDC_SERVER_URL else [SELF, OIDC_SERVER_URL],
        "object-src": [NONE],
    }
}
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 14 * 86_400
if BEHIND_TLS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = True
    SECURE_HSTS_SECONDS = 31_536_000

# -- time, language, files -----------------------------------------------------------------------------------------

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-gb"
USE_I18N = False
STATIC_URL = "/static/"
STATIC_ROOT = env.folder("GPUPORTAL_STATIC_ROOT", GPUPORTAL_DATA / "static")
STATICFILES_DIRS = [BASE_DIR / "static"] if (BASE_DIR / "static").is_dir() else []
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "gpuportal.staticfiles.Storage"},
}
WHITENOISE_KEEP_ONLY_HASHED_FILES = True
DATA_UPLOAD_MAX_MEMORY_SIZE = 10 << 20
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"

CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

# -- e-mail --------------------------------------------------------------------------------------------------------

EMAIL_HOST = env.text("EMAIL_HOST")
EMAIL_PORT = env.integer("EMAIL_PORT", 587, 1, 65_535)
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = env.text("EMAIL_HOST_USER"), env.text("EMAIL_HOST_PASSWORD")
EMAIL_TIMEOUT = 20
EMAIL_USE_TLS = env.boolean("EMAIL_USE_TLS", True)
DEFAULT_FROM_EMAIL = env.text("DEFAULT_FROM_EMAIL", "gpuportal@localhost")
EMAIL_BACKEND = (
    "django.core.mail.backends.smtp.EmailBackend" if EMAIL_HOST else "django.core.mail.backends.dummy.EmailBackend"
)

# -- REST API ------------------------------------------------------------------------------------------------------

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "teams.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_THROTTLE_CLASSES": ["rest_framework.throttling.UserRateThrottle"],
    "DEFAULT_THROTTLE_RATES": {"user": env.text("GPUPORTAL_API_RATE", "12000/min")},
    "EXCEPTION_HANDLER": "gpuportal.api.problem_details",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "COERCE_DECIMAL_TO_STRING": False,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "GPU Portal",
    "DESCRIPTION": "Everything that the portal can do, for scripts.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "ENUM_ADD_EXPLICIT_BLANK_NULL_CHOICE": False,
}

# -- the loop ------------------------------------------------------------------------------------------------------

CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://", 1)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 3600,
    "socket_timeout": 5,
    "socket_connect_timeout": 2,
    # A wake-up that cannot be sent is left to beat: else every request would wait for the broker (6 s measured).
    "max_retries": 0,
}
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = False  # a lost wake-up changes nothing: beat sends the next one
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_TASK_ROUTES = {
    "scheduling.tasks.run_cycle": {"queue": "cycle"},
    "scheduling.tasks.dispatch": {"queue": "dispatch"},
    "scheduling.tasks.reconcile": {"queue": "reconcile"},
    # What talks to the world outside may hang, and holds up nothing else.
    "scheduling.tasks.tell": {"queue": "outside"},
    "scheduling.tasks.deliver": {"queue": "outside"},
    "scheduling.tasks.send_mails": {"queue": "outside"},
}
CELERY_BEAT_SCHEDULE_FILENAME = str(GPUPORTAL_DATA / "celerybeat-schedule")
CELERY_BEAT_SCHEDULE = {
    "cycle": {"task": "scheduling.tasks.run_cycle", "schedule": 5.0, "options": {"expires": 5}},
    "dispatch": {"task": "scheduling.tasks.dispatch", "schedule": 2.0, "options": {"expires": 2}},
    "reconcile": {"task": "scheduling.tasks.reconcile", "schedule": 2.0, "options": {"expires": 2}},
    "housekeeping": {"task": "scheduling.tasks.housekeeping", "schedule": 600.0, "options": {"expires": 600}},
    "waits": {"task": "scheduling.tasks.note_waits", "schedule": 60.0, "options": {"expires": 60}},
    "rollup": {"task": "scheduling.tasks.rollup", "schedule": 60.0, "options": {"expires": 60}},
    "watch": {"task": "scheduling.tasks.watch", "schedule": 60.0, "options": {"expires": 60}},
    "tell": {"task": "scheduling.tasks.tell", "schedule": 5.0, "options": {"expires": 5}},
    "deliver": {"task": "scheduling.tasks.deliver", "schedule": 5.0, "options": {"expires": 5}},
    "send-mails": {"task": "scheduling.tasks.send_mails", "schedule": 20.0, "options": {"expires": 20}},
    "demo-feed": {"task": "scheduling.tasks.feed_demo", "schedule": 2.0, "options": {"expires": 2}},
}

# -- logs ----------------------------------------------------------------------------------------------------------

_shared = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
structlog.configure(
    processors=[*_shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)
_renderer = (
    structlog.processors.JSONRenderer()
    if GPUPORTAL_LOG_FORMAT == "json"
    else structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
)
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "structured": {
            "()": structlog.stdlib.ProcessorFormatter,
            "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer],
            "foreign_pre_chain": _shared,
        }
    },
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "structured"}},
    "root": {"handlers": ["console"], "level": env.choice("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))},
    "loggers": {
        "celery.app.trace": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.worker.request": {"level": "WARNING"},
        "celery.beat": {"level": "WARNING"},
        "django.request": {"level": "ERROR"},
        "axes": {"level": "WARNING"},
    },
}

SILENCED_SYSTEM_CHECKS = ["axes.W003"]

if "PYTEST_VERSION" not in os.environ:
    env.refuse_unknown()
